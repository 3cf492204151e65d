"""The readers of the files in a run directory: metrics, warnings, logs and the outcome. Samples have their own reader,
`shared.samples.reader`.

Everything that shows or reports a run reads its files with these modules. They may be used while the files are being
written, and never write.
"""
