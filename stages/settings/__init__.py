"""What may be set, and what is refused. Standard library only.

checks        the error that a user can mend, and the checks that raise it
faults        what ends a command in one line
stages        the one table of stages
prompt        its check, how it is filled and read back
sections      data, SFT, RM, DPO, LoRA, evaluation, memory
ppo           PPO, RLOO and Dr.GRPO, and what they share
judge         the judge, summaries that exist already, and a policy that others trained
judge_models  what its models cost, and when they end
config        all sections in one frozen tree
presets       settings by name, and the switches of `make ablations`
command_line  a preset with what the command line changes
families      what differs between model families, and numbers that stages and the plan share
"""
