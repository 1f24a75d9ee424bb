"""Scaling of BERTs (masked tokens) on text files: about an hour on two cores, minutes on a GPU.

python -m experiments.scaling --config=configs/scaling_bert.py --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from configs import scaling_gpt


def get_config():
    """The ladder of scaling_gpt.py with the masked objective: 15 % of the tokens, 80/10/10."""
    config = scaling_gpt.get_config()
    config.model.family = "bert"
    config.data.objective = "masked"
    config.train.eval_rows = 4096  # 15 % of the positions count
    return config
