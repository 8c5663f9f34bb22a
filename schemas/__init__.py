"""Wire vocabulary: errors, subjects, records, messages and their codec. Imports nothing of ours."""
