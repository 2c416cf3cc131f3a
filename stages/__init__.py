"""RLHF on TL;DR summarization. The stages, in the order in which they run:

base        the checkpoint, the tokenizer and the tokenized posts that a preset starts from
sft         supervised fine-tuning on the reference summaries
rm          a reward model from pairwise comparisons, read at the EOS token
normalize   shifts the reward so that human summaries score 0 on average
ppo         trains the policy against the reward model, close to the SFT model
rloo, grpo, reinforce   the same without a critic
dpo         trains a policy directly on the comparisons, without a reward model
released    takes a policy that others trained, in place of the stages above

`eval` then samples summaries of held-out posts and has them judged; `reports` writes the pages.

The stages are built from these modules:

functional  every formula
rl          one update of a policy-gradient algorithm, step by step
models      load, save and run models
training    accelerator, optimizer steps, memory, checkpoints
data        from text to tokens
config      the settings and their checks
runs        a run's folder: config, metrics, manifest, checkpoints, lock, progress

These modules run them:

__main__    the command line, with the function of each stage and each tool
pipeline    which stages are done, stale or missing, and how to run them
"""
