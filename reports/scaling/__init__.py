"""What the page about sizes says, as plain numbers first.

fits          rows of numbers by seed, means over seeds, straight lines over log parameters
verdicts      does PPO beat the references at a size; seeds called out; over-optimisation
beside_paper  reproduced, higher, lower or not comparable, number by number
curves        plots over parameters, and the frontier of score, win rate and KL
answers       the blocks of the first screen
details       the blocks below it
"""
