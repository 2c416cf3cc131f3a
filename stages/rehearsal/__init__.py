"""Every stage at its real shapes on the user's machine, a few steps of each, measured.

weights   where the rehearsal's weights come from
texts     real posts, or tokens of the real lengths
meter     peak memory and time
bench     what every part needs
parts     one part, in a process of its own
ppo       PPO's part
table     what was found, beside the plan
rehearse  the command
update    one whole update of PPO, for `make bench`
peers     other implementations: their environments, and the task that each is given
peer_trl  TRL's PPOTrainer on that task
speed     ours and the peers by turns
"""
