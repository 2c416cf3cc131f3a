"""What the page about sizes says, as plain numbers first.

measures      numbers by seed, means over seeds, fits; who beats the references at a size; seeds
              called out; over-optimisation
beside_paper  reproduced, higher, lower or not comparable, number by number
answers       the blocks of the first screen, and plots over parameters
details       the blocks below it
"""
