"""Let training scripts of other libraries run over pipeline stages."""
