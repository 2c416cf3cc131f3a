"""Every stage at its real shapes on the user's machine, a few steps of each, measured.

weights  where the rehearsal's weights come from
"""
