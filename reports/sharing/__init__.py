"""Pages that are kept on purpose: `publish` copies them to reports/generated."""
