//! docs/test-matrix.md lists each body with its cells; this writes it, and fails while it is not true.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

const CELLS: [&str; 4] = ["hybrid_ipv4", "hybrid_ipv6", "user_ipv4", "user_ipv6"];

/// A line of a `matrix!`.
struct Line {
    body: String,
    cells: Vec<String>,
    /// Cells that are left out, and why.
    left_out: Vec<(Vec<String>, String)>,
}

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e")
}

/// The lines of each module, by its path.
fn lines() -> BTreeMap<String, Vec<Line>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![here()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let blocks = text.split("\nmatrix! {\n").skip(1);
            let blocks = blocks.map(|behind| behind.split_once("\n}").unwrap().0);
            let lines: Vec<Line> = blocks.flat_map(parse).collect();
            if lines.is_empty() {
                continue;
            }
            let module = path.strip_prefix(here()).unwrap().with_extension("");
            let module = module.display().to_string().replace('/', "::");
            all.insert(module.replace("::mod", ""), lines);
        }
    }
    all
}

fn parse(block: &str) -> Vec<Line> {
    let block = block.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut rest = block.as_str();
    let mut lines = Vec::new();
    while let Some((body, behind)) = rest.split_once(": [") {
        let (cells, mut behind) = behind.split_once(']').unwrap();
        let mut left_out = Vec::new();
        while let Some(more) = behind.strip_prefix(", without [") {
            let (without, more) = more.split_once("]: \"").unwrap();
            let (reason, more) = more.split_once('"').unwrap();
            left_out.push((names(without), reason.to_owned()));
            behind = more;
        }
        lines.push(Line {
            body: body.trim().to_owned(),
            cells: names(cells),
            left_out,
        });
        rest = behind.strip_prefix(';').unwrap();
    }
    lines
}

fn names(text: &str) -> Vec<String> {
    text.split(',').map(|name| name.trim().to_owned()).collect()
}

fn table() -> String {
    let mut out = String::from(
        "# The test matrix\n\n\
         End-to-end tests whose body is written once and runs in each mode and for each family \
         (`tests/tests/e2e/matrix`). The name of a test is its module, its body and its cell: \
         `policy::quic::quic::user_ipv6`. A body that has no test in some cell says why. \
         All other end-to-end tests are of what only one mode or family has, or are not yet written by \
         cell.\n\n\
         This file is written by `UPDATE=1 cargo test -p slipgate-testbed --test e2e matrix::`.\n\n\
         | body | hybrid, IPv4 | hybrid, IPv6 | user mode, IPv4 | user mode, IPv6 |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    let mut reasons: Vec<String> = Vec::new();
    for (module, lines) in lines() {
        for line in lines {
            out.push_str(&format!("| `{module}::{}` |", line.body));
            for cell in CELLS {
                let is_in = |cells: &Vec<String>| cells.iter().any(|name| name == cell);
                let why = line.left_out.iter().find(|(cells, _)| is_in(cells));
                let shown = match why {
                    None => {
                        assert!(is_in(&line.cells), "{}: {cell}", line.body);
                        "runs".to_owned()
                    }
                    Some((_, reason)) => {
                        let known = reasons.iter().position(|known| known == reason);
                        let number = known.unwrap_or_else(|| {
                            reasons.push(reason.clone());
                            reasons.len() - 1
                        });
                        format!("no ({})", number + 1)
                    }
                };
                out.push_str(&format!(" {shown} |"));
            }
            out.push('\n');
        }
    }
    out.push_str("\nWhy not:\n\n");
    for (number, reason) in reasons.iter().enumerate() {
        out.push_str(&format!("{}. {reason}.\n", number + 1));
    }
    out
}

#[test]
fn the_list_of_what_runs_where_is_true() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/test-matrix.md");
    let wanted = table();
    if env::var_os("UPDATE").is_some() {
        fs::write(&file, &wanted).unwrap();
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        written == wanted,
        "docs/test-matrix.md is not what the tests say; UPDATE=1 writes it"
    );
}
