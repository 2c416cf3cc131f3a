"""The folder of a run on disk, and a running stage in it.

Folders and records
  manifest      where a stage's folder is, and what a finished stage recorded in it
  inputs        the identity of everything that a stage reads
  user_files    inputs: the user's files
  gold          inputs: the gold reward model of a judge
  code          which files of this project a stage runs, and their hashes
  differences   how settings and inputs differ from a record
  staleness     whether a finished stage matches a config
  attempts      whether a half-finished stage can be resumed
  make_command  the command that runs a stage, for messages

A running stage
  run           its folder, metrics and manifest
  locks         so that only one process runs it
  progress      its progress
  signals       the signals that stop it
  trackers      wandb and TensorBoard
  machine       the machine it ran on: libraries, device, memory

Helpers
  files         files that are never half-written, their hashes, JSON lines that survive a kill
  hub           models and data sets of the hub, each at one commit
  text          lines of 80 columns, durations, shortened lists
"""
