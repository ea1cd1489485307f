"""Worker processes that a parent limits and may end at any moment: grammars, chat templates, images and videos."""
