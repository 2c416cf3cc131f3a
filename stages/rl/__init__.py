"""The heart: what any policy-gradient stage shares. It takes tensors, a learner and settings.

networks       policy, critic if any, frozen networks, and the learner that holds them
episodes       one update's episodes as tensors
rollout        1. sample, 2. measure, 3. score
credit         4. shape the rewards, 5. advantages by GAE, whitening
loss           what the update descends
update         6. learn: minibatches, optimizer steps
grouped        the loop of RLOO and Dr.GRPO
metrics        what is reported of an update
start_checks   what must hold before the first update
update_checks  what must hold in each: rewards, credit, KL, moments
"""
