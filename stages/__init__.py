"""The pipeline of RLHF on TL;DR, one module a stage:

base       the checkpoint, the tokenizer and the tokenised posts that a preset starts from
sft        supervised fine-tuning on the reference summaries
reward     a reward model from pairwise comparisons, read at the EOS token
normalize  the reward of a human summary becomes 0; the critic is a copy of the result
ppo        the policy learns to write what the reward model likes, held near the SFT model
eval       summaries of held-out posts, a judge's verdicts, win rates with intervals
reports    one page a run, sizes side by side
"""
