"""What may be set, and what is refused. Standard library only.

checks        the error that a user can mend, and the checks that raise it
faults        what ends a command in one line
stages        the one table of stages
sections      data and prompt, SFT, RM, DPO, memory
ppo           PPO, RLOO and Dr.GRPO, adapters
judge         evaluation, the judge, and what is judged without training
judge_prompt  the text of the question to an LLM
judge_models  what its models cost, and the key
config        all sections in one frozen tree
presets       settings by name, and the switches of `make ablations`
command_line  a preset with what the command line changes
"""
