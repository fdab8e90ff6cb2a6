//! Parses the sources of a crate and finds the dependencies between its top-level modules.
//!
//! Sources are read as tokens, so a path is found in a `use`, a type, an expression and a macro's
//! arguments alike. Only paths that begin with `crate`, `super` or `self` can leave a module. They
//! lead to a module of the crate's root, or to a name that the root imports from a module.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};
use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};

use super::{Graph, Place};

/// Returns the dependencies between the top-level modules of the crate whose root is the file
/// `root`. `read` returns a file's text.
///
/// # Errors
/// `read` fails, or a file is not Rust.
pub(super) fn graph(root: &Path, read: &dyn Fn(&Path) -> Result<String>) -> Result<Graph> {
    let mut sources = Sources {
        read,
        names: BTreeMap::new(),
        imports: BTreeMap::new(),
        globs: Vec::new(),
        references: Vec::new(),
        loose: Vec::new(),
    };
    let module = Module {
        path: Vec::new(),
        file: root.to_owned(),
        folder: root.parent().unwrap_or(Path::new("")).to_owned(),
        is_inline: false,
    };
    sources.read_file(&module)?;
    Ok(sources.resolve())
}

/// State of a crate's sources, as far as they have been read.
struct Sources<'r> {
    read: &'r dyn Fn(&Path) -> Result<String>,
    /// Names that each top-level module declares at its top level.
    names: BTreeMap<String, BTreeSet<String>>,
    /// Names that the root imports, with the path of each.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths of the root's glob imports.
    globs: Vec<Vec<String>>,
    references: Vec<Reference>,
    /// Paths whose first segment may have been imported from the root by `use super::*`.
    loose: Vec<Reference>,
}

/// A path that leads out of a module, relative to the crate's root.
struct Reference {
    from: Vec<String>,
    to: Vec<String>,
    place: Place,
}

/// Module that is being read.
#[derive(Clone)]
struct Module {
    path: Vec<String>,
    file: PathBuf,
    /// Directory of the files of its child modules.
    folder: PathBuf,
    /// Whether the module has its body inline, in braces.
    is_inline: bool,
}

/// One path of a `use`, or any other path.
struct Leaf {
    segments: Vec<String>,
    /// Name that the path is bound to in this module.
    name: String,
    line: usize,
}

impl Sources<'_> {
    fn read_file(&mut self, module: &Module) -> Result<()> {
        let text = (self.read)(&module.file)?;
        let tokens: TokenStream = text
            .parse()
            .map_err(|why| anyhow!("{why}"))
            .with_context(|| format!("{} is not Rust", module.file.display()))?;
        self.scan(tokens, module, true)
    }

    /// Scans a module's or a block's tokens. `is_top`: whether the tokens are the module's own
    /// items.
    fn scan(&mut self, tokens: TokenStream, module: &Module, is_top: bool) -> Result<()> {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut path_attribute = None;
        let mut at = 0;
        while at < tokens.len() {
            if let Some((attribute, next)) = attribute(&tokens, at) {
                at = next;
                if is_for_tests(attribute) {
                    at = behind_item(&tokens, at);
                    path_attribute = None;
                } else if let Some(path) = value_of(attribute, "path") {
                    path_attribute = Some(path);
                } else if !begins_with(attribute, "doc") {
                    self.scan_strings(attribute.stream(), module)?;
                    self.scan(attribute.stream(), module, false)?;
                }
                continue;
            }
            let word = match &tokens[at] {
                TokenTree::Ident(word) => word,
                TokenTree::Group(group) => {
                    self.scan(group.stream(), module, false)?;
                    at += 1;
                    continue;
                }
                _ => {
                    at += 1;
                    continue;
                }
            };
            at += 1;
            match word.to_string().as_str() {
                "mod" if is_top => {
                    if let Some(TokenTree::Ident(name)) = tokens.get(at) {
                        let body = match tokens.get(at + 1) {
                            Some(TokenTree::Group(body)) => Some(body),
                            _ => None,
                        };
                        self.enter(module, name, path_attribute.take(), body)?;
                        at += 2;
                    }
                }
                // In `pub(in crate::x)` it only says who may see.
                "pub" => {
                    if let Some(TokenTree::Group(group)) = tokens.get(at)
                        && group.delimiter() == Delimiter::Parenthesis
                    {
                        at += usize::from(begins_with(group, "in"));
                    }
                }
                "use" => {
                    let mut leaves = Vec::new();
                    at = read_tree(&tokens, at, &[], &mut leaves);
                    for leaf in leaves {
                        self.import(module, leaf, is_top);
                    }
                }
                "crate" | "super" | "self" if is_colons(&tokens, at) => {
                    let mut leaves = Vec::new();
                    at = read_tree(&tokens, at - 1, &[], &mut leaves);
                    for leaf in leaves {
                        self.refer(module, leaf);
                    }
                }
                name => {
                    if is_top && let [top] = module.path.as_slice() {
                        // Among these are the names of its items.
                        let names = self.names.entry(top.clone()).or_default();
                        names.insert(name.to_owned());
                    }
                    let before = |n: usize| at.checked_sub(n).and_then(|at| tokens.get(at));
                    let is_path = is_punct(before(2), ':') && is_punct(before(3), ':');
                    let is_first = !is_punct(before(2), '.') && !is_path;
                    let is_type = name.starts_with(char::is_uppercase);
                    if is_first && (is_type || is_colons(&tokens, at)) {
                        self.loose.push(Reference {
                            from: module.path.clone(),
                            to: vec![name.to_owned()],
                            place: place(module, word.span().start().line),
                        });
                    }
                }
            }
            path_attribute = None;
        }
        Ok(())
    }

    /// Scans an attribute's strings, which may name functions: `#[serde(with = "crate::x")]`.
    fn scan_strings(&mut self, tokens: TokenStream, module: &Module) -> Result<()> {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.scan_strings(group.stream(), module)?,
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    let path = text.trim_matches('"').parse::<TokenStream>();
                    let path = path.unwrap_or_default().into_iter().map(|mut token| {
                        token.set_span(literal.span());
                        token
                    });
                    let path: Vec<TokenTree> = path.collect();
                    let may_leave = matches!(path.first(), Some(TokenTree::Ident(word))
                        if word == "crate" || word == "super" || word == "self");
                    if may_leave && is_colons(&path, 1) {
                        self.scan(path.into_iter().collect(), module, false)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads a module that `outer` declares. `body`: its tokens if it is inline.
    fn enter(
        &mut self,
        outer: &Module,
        name: &Ident,
        path_attribute: Option<String>,
        body: Option<&Group>,
    ) -> Result<()> {
        let name = name.to_string();
        let mut path = outer.path.clone();
        path.push(name.clone());
        if path.len() == 1 {
            self.names.entry(name.clone()).or_default();
        }
        let beside = match outer.is_inline {
            true => outer.folder.clone(),
            false => outer.file.parent().unwrap_or(Path::new("")).to_owned(),
        };
        if let Some(body) = body {
            let module = Module {
                path,
                file: outer.file.clone(),
                folder: match path_attribute {
                    Some(folder) => beside.join(folder),
                    None => outer.folder.join(name),
                },
                is_inline: true,
            };
            return self.scan(body.stream(), &module, true);
        }
        let (file, folder) = match path_attribute {
            Some(file) => {
                let file = beside.join(file);
                let folder = file.parent().unwrap_or(Path::new("")).to_owned();
                (file, folder)
            }
            None => {
                let folder = outer.folder.join(&name);
                let flat = outer.folder.join(format!("{name}.rs"));
                let file = match (self.read)(&flat) {
                    Ok(_) => flat,
                    Err(_) => folder.join("mod.rs"),
                };
                (file, folder)
            }
        };
        if file
            .file_stem()
            .is_some_and(|stem| stem.to_string_lossy().ends_with("_test"))
        {
            return Ok(());
        }
        self.read_file(&Module {
            path,
            file,
            folder,
            is_inline: false,
        })
    }

    /// Records a path of a `use`. Imports of the root resolve later paths `crate::Name`.
    fn import(&mut self, module: &Module, leaf: Leaf, is_top: bool) {
        if is_top && let [top] = module.path.as_slice() {
            let names = self.names.entry(top.clone()).or_default();
            names.insert(leaf.name.clone());
        }
        if !module.path.is_empty() {
            return self.refer(module, leaf);
        }
        let path = match leaf.segments.first().map(String::as_str) {
            Some("crate" | "self") => leaf.segments[1..].to_vec(),
            _ => leaf.segments,
        };
        if !is_top {
            return;
        }
        match path.split_last() {
            Some((last, of)) if last == "*" => self.globs.push(of.to_vec()),
            // `use x::Y as x` must not lead to itself.
            _ if path.first() != Some(&leaf.name) => drop(self.imports.insert(leaf.name, path)),
            _ => {}
        }
    }

    /// Records a path if it leads out of the module.
    fn refer(&mut self, module: &Module, leaf: Leaf) {
        let mut to = module.path.clone();
        let mut segments = leaf.segments.iter().peekable();
        match segments.next().map(String::as_str) {
            Some("crate") => to.clear(),
            Some("super") => drop(to.pop()),
            Some("self") => {}
            _ => return,
        }
        while segments.next_if(|segment| *segment == "super").is_some() {
            to.pop();
        }
        to.extend(segments.cloned());
        self.references.push(Reference {
            from: module.path.clone(),
            to,
            place: place(module, leaf.line),
        });
    }

    /// Returns the edges between top-level modules.
    fn resolve(self) -> Graph {
        let takes_all: BTreeSet<&[String]> = self
            .references
            .iter()
            .filter(|reference| reference.to == ["*"])
            .map(|reference| reference.from.as_slice())
            .collect();
        let loose = self
            .loose
            .iter()
            .filter(|reference| takes_all.contains(reference.from.as_slice()));
        let mut graph = Graph::new();
        for reference in self.references.iter().chain(loose) {
            let Some(from) = reference.from.first() else {
                continue;
            };
            if let Some(to) = self.top_of(&reference.to, 0)
                && to != from
            {
                let places = graph.entry((from.clone(), to.clone())).or_default();
                places.push(reference.place.clone());
            }
        }
        for places in graph.values_mut() {
            places.sort();
            places.dedup();
        }
        graph
    }

    /// Returns the top-level module that a path leads to; `None` if it leads to none. `depth`:
    /// imports followed so far.
    fn top_of(&self, path: &[String], depth: usize) -> Option<&String> {
        /// Maximum length of a chain of imports. A longer one is a cycle.
        const DEEPEST: usize = 16;
        let first = path.first()?;
        if let Some((module, _)) = self.names.get_key_value(first) {
            return Some(module);
        }
        if depth > DEEPEST {
            return None;
        }
        if let Some(from) = self.imports.get(first) {
            return self.top_of(from, depth + 1);
        }
        let has_it = |of: &&Vec<String>| {
            let top = self.top_of(of, depth + 1);
            // Deeper modules are not looked into: of those, any name may be.
            top.is_some_and(|top| of.len() > 1 || self.names[top].contains(first))
        };
        self.top_of(self.globs.iter().find(has_it)?, depth + 1)
    }
}

fn place(module: &Module, line: usize) -> Place {
    Place {
        file: module.file.clone(),
        line,
    }
}

/// Returns the brackets of the attribute that begins at `at`, and the index of the token after it.
fn attribute(tokens: &[TokenTree], at: usize) -> Option<(&Group, usize)> {
    if !is_punct(tokens.get(at), '#') {
        return None;
    }
    let at = at + 1 + usize::from(is_punct(tokens.get(at + 1), '!'));
    match tokens.get(at) {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
            Some((group, at + 1))
        }
        _ => None,
    }
}

/// Whether an attribute restricts its item to tests.
fn is_for_tests(attribute: &Group) -> bool {
    let all: String = attribute.stream().to_string();
    let all: String = all.split_whitespace().collect();
    all == "test"
        || all == "cfg(test)"
        || all.starts_with("cfg(all(test,")
        || (all.starts_with("cfg(all(") && all.ends_with(",test))"))
}

/// Returns the string of an attribute `name = "..."`.
fn value_of(attribute: &Group, name: &str) -> Option<String> {
    let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Ident(is), equals, TokenTree::Literal(value)]
            if is == name && is_punct(Some(equals), '=') =>
        {
            Some(value.to_string().trim_matches('"').to_owned())
        }
        _ => None,
    }
}

fn begins_with(group: &Group, word: &str) -> bool {
    matches!(group.stream().into_iter().next(), Some(TokenTree::Ident(is)) if is == word)
}

/// Returns the index after the item, statement, field or match arm that begins at `at`, with its
/// further attributes.
fn behind_item(tokens: &[TokenTree], mut at: usize) -> usize {
    while let Some((_, next)) = attribute(tokens, at) {
        at = next;
    }
    let is_statement = matches!(tokens.get(at), Some(TokenTree::Ident(word)) if word == "let");
    // A field has no word of these, and ends with a comma.
    let is_item = matches!(tokens.get(at), Some(TokenTree::Ident(word)) if [
        "async", "const", "enum", "extern", "fn", "impl", "macro_rules", "mod", "static", "struct",
        "trait", "type", "union", "unsafe", "use",
    ].contains(&word.to_string().as_str()) || (word == "pub" && tokens[at..].iter().any(is_semicolon_or_braces)));
    let mut angles = 0_usize;
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && !is_statement => {
                break;
            }
            TokenTree::Punct(punct) => match punct.as_char() {
                ';' => break,
                ',' if angles == 0 && !is_item && !is_statement => break,
                '<' => angles += 1,
                '>' if !is_arrow(tokens, at - 1) => angles = angles.saturating_sub(1),
                _ => {}
            },
            _ => {}
        }
    }
    at
}

fn is_semicolon_or_braces(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    }
}

/// Whether the `>` at this token ends `->` or `=>`.
fn is_arrow(tokens: &[TokenTree], at: usize) -> bool {
    let before = at.checked_sub(1).and_then(|at| tokens.get(at));
    is_punct(before, '-') || is_punct(before, '=')
}

/// Reads a path, or the tree of paths of a `use`. Returns the index of the token after it.
fn read_tree(
    tokens: &[TokenTree],
    mut at: usize,
    prefix: &[String],
    leaves: &mut Vec<Leaf>,
) -> usize {
    let mut segments = prefix.to_vec();
    if is_colons(tokens, at) {
        // Of another crate.
        at += 2;
    }
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(word)) => {
                let line = word.span().start().line;
                at += 1;
                // `{self}` means what it is in.
                if word != "self" || segments.is_empty() {
                    segments.push(word.to_string());
                }
                if is_colons(tokens, at) {
                    at += 2;
                    let goes_on = matches!(
                        tokens.get(at),
                        Some(TokenTree::Ident(_) | TokenTree::Group(_))
                    ) || is_punct(tokens.get(at), '*');
                    if goes_on {
                        continue;
                    }
                }
                let mut name = segments.last().cloned().unwrap_or_default();
                if let [Some(TokenTree::Ident(word)), Some(TokenTree::Ident(other))] =
                    [tokens.get(at), tokens.get(at + 1)]
                    && word == "as"
                {
                    name = other.to_string();
                    at += 2;
                }
                leaves.push(Leaf {
                    segments,
                    name,
                    line,
                });
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for part in inner.split(|token| is_punct(Some(token), ',')) {
                    read_tree(part, 0, &segments, leaves);
                }
                at += 1;
            }
            Some(TokenTree::Punct(star)) if star.as_char() == '*' => {
                let line = star.span().start().line;
                segments.push("*".to_owned());
                leaves.push(Leaf {
                    segments,
                    name: "*".to_owned(),
                    line,
                });
                at += 1;
            }
            _ => {}
        }
        return at;
    }
}

fn is_colons(tokens: &[TokenTree], at: usize) -> bool {
    is_punct(tokens.get(at), ':') && is_punct(tokens.get(at + 1), ':')
}

fn is_punct(token: Option<&TokenTree>, which: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == which)
}
