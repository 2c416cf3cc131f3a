"""What is to be seen of runs beside their pages, where somebody asks for it.

cards    the README.md of a saved model
status   which stages are done, stale, running, half done, failed, missing
"""
