"""The dashboard: run folders as a local web page, live while a run goes and afterwards. Reads; never writes or decides.

    run folder -> runs (read, cached by the files' times) -> pages (what each page says) -> templates -> app -> browser

The server libraries are imported by ``app`` and ``serve`` alone, so that the command line stays light.
"""
