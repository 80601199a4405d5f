"""The paper's tables and figures, each a declarative spec over the parts of the package (`its2clr reproduce`)."""
