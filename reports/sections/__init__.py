"""Parts of pages.

judge      who judged, every rate, controls, calibration
dpo        DPO's policy as a reward model
made_with  settings, time, versions, hashes
"""
