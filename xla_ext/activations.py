"""C++ of the table of activations, KINDS in jaxfuse/ops/activations.py: python xla_ext/activations.py FOLDER

Writes activation_rows.h, a macro of what there is, and activation_formulas.h, which is included where the number N is known: in
activation_loops.h and in cuda/activation.cuh. The table is read as text, for JAX need not be installed where this is built.
"""

import ast
import pathlib
import sys

TABLE = pathlib.Path(__file__).parent.parent / "jaxfuse" / "ops" / "activations.py"
Fields = dict[str, ast.expr]


def rows() -> dict[str, Fields]:
    """The fields of each activation."""
    kinds = next(node.value for node in ast.parse(TABLE.read_text()).body
                 if isinstance(node, ast.AnnAssign) and node.target.id == "KINDS")
    found = {name.value: {field.arg: field.value for field in kind.keywords} for name, kind in zip(kinds.keys, kinds.values)}
    lacking = [f"{name} lacks {field}" for name, fields in found.items() for field in ("value", "pullback") if field not in fields]
    if lacking:
        raise SystemExit(f"{TABLE}: {', '.join(lacking)}")
    return found


def cxx(field: ast.expr) -> str:
    """The string in it."""
    return next(node.value for node in ast.walk(field) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def row(name: str, fields: Fields) -> str:
    numbers = 15 if "pieces" in fields else 1 if "alpha" in fields else 0
    onednn = cxx(fields["onednn"]) if "onednn" in fields else "false"
    return f" \\\n  ROW({name}, {numbers}, {'y' if 'pullback_from_y' in fields else 'z'}, {onednn})"


def formulas(name: str, fields: Fields) -> str:
    functions = ""
    for function, arguments in dict(value="z", pullback="gz", pullback_from_y="gy").items():
        if function in fields:
            text = cxx(fields[function])
            body = text if "return " in text else f"return {text};"
            given = ", ".join(f"[[maybe_unused]] {a}" for a in (*[f"N {a}" for a in arguments], "const Parameters& p"))
            functions += f"  FUNCTION static N {function}({given}) {{\n    {body}\n  }}\n"
    return f"\ntemplate <>\nstruct Formulas<Activation::{name}> {{\n{functions}}};\n"


def write(path: pathlib.Path, text: str):
    """Only what has changed, or all would be compiled again."""
    text = "// Made of the table in jaxfuse/ops/activations.py by xla_ext/activations.py.\n" + text
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    folder, known = pathlib.Path(sys.argv[1]), rows()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "activation_rows.h",
          "// name, how many numbers are its parameters, what its derivative is computed from, how oneDNN appends it\n"
          "#define JAXFUSE_ACTIVATIONS(ROW)" + "".join(row(*item) for item in known.items()) + "\n")
    write(folder / "activation_formulas.h",
          "template <Activation activation>\nstruct Formulas;\n" + "".join(formulas(*item) for item in known.items()))
