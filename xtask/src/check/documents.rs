//! Checks that the tests and files that documents name exist, and that each test is in the place
//! that its mark says.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{metadata, workspace::Workspace};

/// Marks, each with the paths of the tests that have it. The legends of the documents describe the
/// same marks.
const MARKS: [(char, &[&str]); 13] = [
    ('A', &["vmm/tests/net_allocation.rs"]),
    ('C', &["cli/", "broker/", "ipc/"]),
    ('E', &["userspace-nat/src/event_loop/tests/"]),
    ('G', &["tests/tests/guest/"]),
    ('K', &["ebpf/control/src/"]),
    ('M', &["vmm/src/"]),
    ('P', &["ebpf/control/tests/programs/"]),
    ('Q', &["tests/tests/kernels/"]),
    ('S', &["tests/tests/stress/"]),
    ('T', &["vmm/tests/net/"]),
    (
        'U',
        &[
            "userspace-nat/src/",
            "policy/src/",
            "model/src/",
            "ebpf/abi/src/",
        ],
    ),
    ('V', &["vmm/tests/"]),
    ('X', &["tests/tests/e2e/"]),
];
/// Headings of table columns that name tests: every test-like name in them must be a test.
const COLUMNS: [&str; 2] = ["shown by", "test"];

/// Paths of the files with tests, by the test's name.
type Tests = BTreeMap<String, Vec<String>>;

pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let mut tests = Tests::new();
    let folders = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    let mut sources = vec![workspace.root.join("ebpf/programs")];
    for folder in folders.iter().map(|package| &package.folder) {
        sources.push(folder.clone());
        for file in files(folder, "rs")? {
            let text = read(&file)?;
            let path = file.strip_prefix(&workspace.root).unwrap_or(&file);
            for name in tests_in(&text) {
                let at = path.display().to_string();
                tests.entry(name.to_owned()).or_default().push(at);
            }
        }
    }
    let is_there = |path: &str| {
        let in_sources = |folder: &PathBuf| folder.join("src").join(path).exists();
        workspace.root.join(path).exists() || sources.iter().any(in_sources)
    };
    let mut wrong = Vec::new();
    let mut documents = files(&workspace.root.join("docs"), "md")?;
    documents.extend(["README.md", "CONTRIBUTING.md"].map(|name| workspace.root.join(name)));
    for file in documents {
        let name = file.strip_prefix(&workspace.root).unwrap_or(&file);
        let (name, text) = (name.display(), read(&file)?);
        for (line, what) in wrong_in(&text, &tests) {
            wrong.push(format!("{name}:{line}: {what}"));
        }
        for (line, path) in sources_in(&text).filter(|(_, path)| !is_there(path)) {
            wrong.push(format!("{name}:{line}: there is no file {path}"));
        }
    }
    if !wrong.is_empty() {
        bail!(
            "documents name tests or files that do not exist:\n  {}",
            wrong.join("\n  ")
        );
    }
    Ok(())
}

/// Returns the Rust files that a document names in backticks, with their line numbers. Paths are
/// relative to the root or to a crate's `src`.
fn sources_in(document: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(document.lines());
    lines.flat_map(|(number, line)| {
        let is_source = |text: &&str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "/_-.".contains(c);
            text.contains('/') && text.ends_with(".rs") && text.chars().all(plain)
        };
        let named = in_backticks(line).filter(is_source);
        named.map(move |path| (number, path))
    })
}

/// Returns the errors of a document, with their line numbers.
fn wrong_in(document: &str, tests: &Tests) -> Vec<(usize, String)> {
    let mut wrong = Vec::new();
    // The place of a column of tests, while in a table that has one.
    let mut column = None;
    for (number, line) in (1..).zip(document.lines()) {
        let mut complain = |what| wrong.push((number, what));
        for (name, marks) in marked(line) {
            if let Some(what) = misplaced(name, marks, tests) {
                complain(what);
            }
        }
        if !line.starts_with('|') {
            column = None;
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let Some(at) = cells.iter().position(|cell| COLUMNS.contains(cell)) {
            column = Some(at);
        } else if let Some(cell) = column.and_then(|at| cells.get(at)) {
            // Behind that word are targets of cargo-fuzz.
            let cell = cell.split("fuzz target").next().unwrap_or_default();
            for name in in_backticks(cell).filter(|name| is_test_name(name)) {
                if places(name, tests).next().is_none() {
                    complain(format!("there is no test `{name}`"));
                }
            }
        }
    }
    wrong.dedup();
    wrong
}

/// Returns each test name before a `(MARKS)`, with its marks: from "`a`, `b` (E, U; and in words)",
/// `a` and `b`, each with E and U.
fn marked(line: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let pieces: Vec<&str> = line.split('`').collect();
    // Pieces in backticks are the odd ones.
    let mut first = 1;
    for at in (1..pieces.len().saturating_sub(1)).step_by(2) {
        let behind = pieces[at + 1];
        if behind == ", " || behind == " and " {
            continue;
        }
        let marks = behind
            .strip_prefix(" (")
            .and_then(|rest| rest.split(')').next());
        if let Some(marks) = marks.filter(|marks| letters(marks).next().is_some()) {
            let names = pieces[first..=at].iter().step_by(2);
            found.extend(
                names
                    .filter(|name| is_test_name(name))
                    .map(|name| (*name, marks)),
            );
        }
        first = at + 2;
    }
    found
}

/// Returns the words of a mark list that are a single capital letter.
fn letters(marks: &str) -> impl Iterator<Item = char> {
    let words = marks.split([',', ';', ' ']);
    words.filter_map(|word| {
        let mut letters = word.chars();
        let one = letters.next().filter(char::is_ascii_uppercase)?;
        letters.next().is_none().then_some(one)
    })
}

fn misplaced(name: &str, marks: &str, tests: &Tests) -> Option<String> {
    let Some(unknown) = letters(marks).find(|mark| folders(*mark).is_none()) else {
        let marked: Vec<&str> = letters(marks)
            .filter_map(folders)
            .flatten()
            .copied()
            .collect();
        let is_there = |path: &str| {
            // What is the engine's is not beside its source.
            let is_engines = path.starts_with("userspace-nat/src/event_loop/tests/");
            let may_be = |folder: &&str| {
                path.starts_with(*folder) && (!is_engines || folder.contains("event_loop"))
            };
            marked.iter().any(may_be)
        };
        if places(name, tests).any(is_there) {
            return None;
        }
        let found: Vec<&str> = places(name, tests).collect();
        return Some(match found.is_empty() {
            true => format!("there is no test `{name}`"),
            false => format!("`{name}` ({marks}) is in {}", found.join(", ")),
        });
    };
    Some(format!(
        "`{name}` is marked {unknown}, which xtask/src/check/documents.rs does not know"
    ))
}

fn folders(mark: char) -> Option<&'static [&'static str]> {
    let row = MARKS.iter().find(|(known, _)| *known == mark)?;
    Some(row.1)
}

/// Returns the paths of the tests with this name. A name that ends in … matches all tests with that
/// prefix.
fn places<'t>(name: &str, tests: &'t Tests) -> impl Iterator<Item = &'t str> {
    let (start, is_whole) = match name.split_once('…') {
        Some((start, _)) => (start.to_owned(), false),
        None => (name.to_owned(), true),
    };
    let from = tests.range(start.clone()..);
    from.take_while(move |(name, _)| name.starts_with(&start) && (!is_whole || **name == start))
        .flat_map(|(_, paths)| paths)
        .map(String::as_str)
}

/// Whether a text looks like a test's name: lower-case words joined by underscores.
fn is_test_name(name: &str) -> bool {
    let is_of_one = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '…';
    name.contains('_') && name.chars().all(is_of_one)
}

fn in_backticks(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the names of the functions under `#[test]`, and of those that a `matrix!` makes tests of.
fn tests_in(source: &str) -> Vec<&str> {
    let behind = source.split("#[test]").skip(1);
    let name = |text: &'_ str| -> Option<usize> { text.find("fn ") };
    let alone = behind.filter_map(|text| {
        let rest = &text[name(text)? + 3..];
        rest.split(['(', '<']).next().map(str::trim)
    });
    let blocks = source.split("\nmatrix! {\n").skip(1);
    let lines = blocks.filter_map(|text| text.split("\n}").next());
    let bodies = lines.flat_map(str::lines).filter_map(|line| {
        let (name, _) = line.trim().split_once(": [")?;
        (!name.contains(' ')).then_some(name)
    });
    alone.chain(bodies).collect()
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("read {}", file.display()))
}

/// Returns all files with an extension below a directory, except build output.
pub(super) fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "target") {
                found.extend(files(&path, ending)?);
            }
        } else if path.extension().is_some_and(|is| is == ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
#[path = "documents_test.rs"]
mod tests;
