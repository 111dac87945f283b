"""The two views of a model's specification: the form (YAML) and the code view, and the graph both stand for.

`source` reads text, `parser` and `grammar.lark` make a tree of it, `elaboration` a graph with a shape on every edge,
`fitting` a `ModelSpec` of that; `code` and `form` write the two views; `drawing` draws the graph.
"""
