"""What others see of a run, where its maker asks for it. Standard library only at the top.

mirror    one wandb run a seed, which every stage continues
board     TensorBoard's event files
contents  what a finished stage shows: results, tables, artifacts
card      the README.md of a saved model
"""
