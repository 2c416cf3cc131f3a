"""What may be set, and what is refused. Standard library only.

checks        the error that a user can mend, and the checks that raise it
stages        the one table of stages
sections      data, SFT, RM, DPO, LoRA, evaluation, memory
ppo           PPO
judge         the judge
judge_models  what its models cost, and when they end
released      a policy that others trained
outputs       summaries that exist already, and their columns
config        all sections in one frozen tree
presets       settings by name
command_line  a preset with what the command line changes
families      what differs between model families
constants     numbers that stages and the plan share
hidden        settings as others may see them
ablations     the switches of `make ablations`
"""
