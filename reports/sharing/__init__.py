"""What is to be seen of runs beside their pages, where somebody asks for it.

cards    the README.md of a saved model
publish  pages that are kept on purpose
status   which stages are done, stale, running, half done, failed, missing
"""
