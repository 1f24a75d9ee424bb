"""Scaling of BERTs (masked tokens) on text files: about an hour and a half on one core, minutes on a GPU.

jaxformer scaling scaling_bert --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """The shapes of scaling_gpt.py with the masked objective.

    For its first thousand steps or more a BERT knows only how frequent each token is, and its loss follows no power law
    yet (Chen et al. 2024, "Sudden drops in the loss"). Shorter runs are left out, budgets are larger, and what ends
    that stage early is chosen: rotary positions, whose longest wave is three contexts with this base instead of two
    hundred (with T5's biases it lasts three times as long or more), and 30 % of the tokens masked (Wettig et al. 2023,
    "Should you mask 15% in masked language modeling?"), 80/10/10.
    """
    config = ConfigDict(load("scaling_gpt"))
    config.model.family = "bert"
    config.model.positions.update(kind="rotary", base=100.0)
    config.data.objective = "masked"
    config.data.mask_rate = 0.3
    config.optimizer.learning_rate = 1e-2
    config.train.eval_rows = 4096  # 30 % of the positions count
    config.ladder.widths = (20, 40, 60, 80, 100, 140)
    config.ladder.budgets = (1e12, 2.5e12, 6.3e12, 1.6e13)
    config.ladder.min_steps = 2200
    config.ladder.max_tokens_per_parameter = 550.0
    config.ladder.learning_rates = (0.5, 1.0)  # at widths 20 and 40 twice the start was never best
    config.ladder.learning_rate_extensions = 0
    config.ladder.searched_sizes = 3
    config.ladder.seeded_sizes = 1
    return config
