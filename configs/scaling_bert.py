"""Scaling of BERTs (masked tokens) on text files: about an hour on one core, minutes on a GPU.

python -m experiments.scaling --config=configs/scaling_bert.py --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from configs import scaling_gpt


def get_config():
    """The sizes of scaling_gpt.py with the masked objective: 15 % of the tokens, 80/10/10.

    Up to some 2000 steps of this batch a BERT knows little more than how frequent each token is, and its loss follows
    no power law yet (Chen et al. 2024, "Sudden drops in the loss"); shorter runs are left out, and budgets are larger.
    """
    config = scaling_gpt.get_config()
    config.model.family = "bert"
    config.data.objective = "masked"
    config.optimizer.learning_rate = 6e-3
    config.train.eval_rows = 4096  # 15 % of the positions count
    config.ladder.budgets = (3.2e11, 1e12, 3.2e12, 1e13)
    config.ladder.min_steps = 1800
    config.ladder.max_tokens_per_parameter = 300.0
    config.ladder.searched_sizes = 3
    return config
