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
config          all sections in one frozen tree, and what each stage's result depends on
presets         presets and ablations: presets/*.yaml, ablations.yaml, and your own files
yaml_files      YAML whose values stay strings
recorded        the configs that runs have recorded
command_line    a preset with what the command line changes
listing         every setting with its value and its description
"""
