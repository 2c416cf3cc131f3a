"""What pages share.

collect       a finished run as one row of numbers
paired        policies of finished runs beside another one, seed by seed
ablated       one switch's runs beside the default's, and the seeds that failed
gained        what training changed of the proxy and the gold score, by seed
verdicts      whether a switch matters
words         numbers, names and settings in plain words
doubts        what in a run's data and texts could deceive
sentences     what a page says of a run, and what to hold against its numbers
paper         the paper's numbers
run_report    the stage that writes a run's page, and the manifests behind a page
plots         plots as SVG
cells         numbers and texts of tables
blocks        what pages are made of, as HTML, Markdown and JSON
page          blocks, written as Markdown and HTML
"""
