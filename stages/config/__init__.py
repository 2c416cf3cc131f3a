"""What may be set, and what is refused.

checks        the error that a user can fix, and the checks that raise it
faults        how a command ends in one line
stages        the table of stages
section       the base class of sections, on pydantic
sections      data and prompt, SFT, reward model, DPO, memory
ppo           policy-gradient algorithms, PPO
lora          adapters
judge         evaluation, the judge, and what is judged without training
judge_prompt  the text of the question to an LLM
judge_models  what its models cost, and the key
config        all sections in one frozen tree, and what each stage's result depends on
presets       presets and ablations: presets/*.yaml, ablations.yaml, and your own files
yaml_files    YAML whose values stay texts
recorded      what runs have recorded
command_line  a preset with what the command line changes
listing       every setting with its value and its description
"""
