"""A small API with its state in memory: a snapshot of it keeps what it has been told."""

from fastapi import FastAPI, HTTPException

app = FastAPI()
notes: dict[int, str] = {}


@app.put("/notes/{number}")
def put(number: int, text: str) -> dict[str, int]:
    """Keep a note; says how many there are."""
    notes[number] = text
    return {"notes": len(notes)}


@app.get("/notes/{number}")
def get(number: int) -> dict[str, str]:
    """A note that was kept."""
    if number not in notes:
        raise HTTPException(404, f"there is no note {number}")
    return {"text": notes[number]}
