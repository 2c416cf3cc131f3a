"""Parts of pages.

judging      who judged, every rate, controls
calibration  the judge beside labels, and the rates that they correct
samples      posts with every summary
curves       everything that training logged
reward       the reward model, and DPO's policy as one
made_with    settings, time, versions, hashes; a policy that others trained
"""
