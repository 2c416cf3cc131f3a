"""The pipeline of RLHF on TL;DR in eleven lines; the first nine are the stages of this package:

base       the checkpoint, the tokenizer and the tokenised posts that a preset starts from
sft        supervised fine-tuning on the reference summaries
reward     a reward model from pairwise comparisons, read at the EOS token
normalize  the reward of a human summary becomes 0; the critic is a copy of the result
ppo        the policy learns to write what the reward model likes, held near the SFT model
rloo       a rival of PPO that needs no critic
grpo       another
dpo        a second policy from the same comparisons, without a reward model
released   a policy that others trained, in place of the six before
eval       summaries of held-out posts, a judge's verdicts, win rates with intervals
reports    one page a run, sizes side by side

What the stages stand on:

__main__    the one door: checks what is typed, and runs it
goals       every goal and variable that can be typed
pipeline    which stages are done, stale or missing, and what makes them
functional  every formula
finished    is a finished stage still what is asked for
runs        a run's folder: config, metrics, manifest, checkpoints, lock
text_reward a function of texts in the place of a reward model
taken       reward models that others have saved
rl          what any policy-gradient stage shares
learning    what every stage that learns shares
posts       text in, tokens out
running     files, machine, progress, signals, processes of a launch
driving     what starts stages, many runs, what is replaced, what there is to see
settings    what may be set, and what is refused
"""
