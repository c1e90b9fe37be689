"""`outrider serve`: an OpenAI-compatible HTTP server, on fastapi and uvicorn (the extra `serve`)."""
