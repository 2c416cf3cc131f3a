"""Settings: their defaults, presets and checks.

errors          UserError, an error that the user can fix, and how errors are shown
error_messages  turns other libraries' errors into one line with a fix
out_of_memory   recognizes out-of-memory errors
environment     environment variables that accelerate and launchers read
fitting         checks that batches fit the data and a context fits the model
stages          the table of stages
section         the base class of sections, on pydantic
sections        data and prompt, SFT, reward model, DPO, memory
ppo             policy-gradient algorithms, PPO
lora            adapters
judge           evaluation, the judge, and what is judged without training
judge_prompt    the text of the question to an LLM
judge_models    what its models cost, and the key
paths           runs/, the names of runs, and settings that may name a folder
config          all sections in one frozen tree
values          single settings by name: types, defaults, texts, overrides
identity        which settings each stage's result depends on, and their hash
public          what others may see of the settings
yaml_files      YAML whose values stay strings
presets         presets and ablations: presets/*.yaml, ablations.yaml, and your own files
recorded        the configs that runs have recorded
upstream        what a run takes from its upstream
command_line    a request (a preset with its changes) becomes a config
named_runs      the settings of a run that is only named
options         the options of a command line become a request
listing         every setting with its value and its description
"""
