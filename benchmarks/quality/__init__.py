"""Does a quantized recurrent state work on models that were really trained, and what does it cost (docs/quality.md)."""
