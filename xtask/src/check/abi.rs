//! Checks that `ABI_VERSION` is raised when the ABI changes.
//!
//! Processes of different builds share pinned maps and compare nothing but that number. If a field
//! moved, or a bit changed its meaning, under the same number, data would be misread without any
//! error. So `ebpf/abi/layout.txt` describes the ABI of its version: each `repr` type with its
//! fields and discriminants in order, each associated constant of a type (bits, command numbers),
//! and the sizes and definitions of the maps. The description is generated from the sources, as
//! tokens, without comments. It must equal the committed one, whose first line is its version.
//!
//! A changed rule (`tcp`, `rate`) is not detected: whoever changes the behaviour of a function of
//! the ABI crate must raise the version.

use std::{fmt::Write as _, fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};
use quote::ToTokens;
use syn::{Attribute, Field, Item, ItemMacro};

use super::documents::files;
use crate::workspace::{Workspace, capture, say};

const LAYOUT: &str = "ebpf/abi/layout.txt";
const SOURCES: &str = "ebpf/abi/src";
const MAPS: &str = "ebpf/programs/src/maps.rs";
const WRITE: &str = "cargo xtask abi --write";
/// Source files and folders whose constants are not stored in maps, so they may change within a
/// version.
const NOT_STORED: [&str; 2] = ["timeout.rs", "datapath"];

/// Checks that the committed description matches the sources.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let now = describe(workspace)?;
    let kept = fs::read_to_string(workspace.root.join(LAYOUT)).unwrap_or_default();
    match judge(&kept, &now) {
        Ok(()) => Ok(()),
        Err(why) => bail!("{why}"),
    }
}

/// Writes the description from the sources. `unreleased`: no release has this version, so the
/// description may change without a new version.
pub(crate) fn write(workspace: &Workspace, unreleased: bool) -> Result<()> {
    let now = describe(workspace)?;
    let committed = capture(
        Command::new("git")
            .current_dir(&workspace.root)
            .args(["show", &format!("HEAD:{LAYOUT}")]),
    );
    // Without one there is nothing to be kept to.
    let committed = committed.unwrap_or_default();
    if !unreleased && let Err(why) = may_replace(&committed, &now) {
        bail!("{why}");
    }
    let path = workspace.root.join(LAYOUT);
    fs::write(&path, &now).with_context(|| format!("could not write {}", path.display()))?;
    say(format!("wrote {LAYOUT}"));
    Ok(())
}

fn describe(workspace: &Workspace) -> Result<String> {
    let sources = read_sources(&workspace.root.join(SOURCES))?;
    let maps = read(&workspace.root.join(MAPS))?;
    description(&sources, &maps)
}

/// Reads the sources of a folder and of those in it. Returns them by their paths below it, sorted.
fn read_sources(root: &Path) -> Result<Vec<(String, String)>> {
    let mut sources = Vec::new();
    for path in files(root, "rs")? {
        let name = path.strip_prefix(root)?.to_string_lossy();
        if !name.ends_with("_test.rs") {
            sources.push((name.into_owned(), read(&path)?));
        }
    }
    sources.sort();
    Ok(sources)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))
}

/// Whether constants of a source may be stored in maps.
fn is_stored(name: &str) -> bool {
    !NOT_STORED
        .iter()
        .any(|not| Path::new(name).starts_with(not))
}

/// Returns the description: a line `version N`, then a paragraph for each item.
fn description(sources: &[(String, String)], maps: &str) -> Result<String> {
    let mut version = None;
    let mut text = String::new();
    for (name, source) in sources {
        let file = syn::parse_file(source).with_context(|| format!("could not parse {name}"))?;
        let makers = makers(&file.items);
        for item in &file.items {
            if let Item::Macro(item) = item {
                describe_made(&mut text, item, &makers);
            }
            if let Item::Const(constant) = item
                && constant.ident == "ABI_VERSION"
            {
                version = Some(tokens(&constant.expr));
                continue;
            }
            describe_item(&mut text, item, is_stored(name));
        }
    }
    let file = syn::parse_file(maps).with_context(|| format!("could not parse {MAPS}"))?;
    for item in &file.items {
        if let Item::Static(map) = item
            && map.attrs.iter().any(|attribute| is(attribute, "btf_map"))
        {
            let _ = writeln!(text, "map {}: {}", map.ident, tokens(&map.ty));
        }
    }
    let version = version.context("no ABI_VERSION in the ABI crate")?;
    Ok(format!("version {version}\n\n{text}"))
}

fn describe_item(text: &mut String, item: &Item, has_stored_constants: bool) {
    match item {
        Item::Struct(item) => {
            let Some(repr) = repr(&item.attrs) else {
                return;
            };
            let _ = writeln!(text, "struct {} {repr}", item.ident);
            describe_fields(text, item.fields.iter());
        }
        Item::Union(item) => {
            let Some(repr) = repr(&item.attrs) else {
                return;
            };
            let _ = writeln!(text, "union {} {repr}", item.ident);
            describe_fields(text, item.fields.named.iter());
        }
        Item::Enum(item) => {
            let Some(repr) = repr(&item.attrs) else {
                return;
            };
            let _ = writeln!(text, "enum {} {repr}", item.ident);
            let mut next = (String::from("0"), 0);
            for variant in &item.variants {
                if let Some((_, value)) = &variant.discriminant {
                    next = (tokens(value), 0);
                }
                let (from, behind) = &mut next;
                let value = match from.parse::<i128>() {
                    Ok(number) => (number + *behind).to_string(),
                    Err(_) if *behind == 0 => from.clone(),
                    Err(_) => format!("{from} + {behind}"),
                };
                let _ = writeln!(text, "    {} = {value}", variant.ident);
                *behind += 1;
            }
        }
        Item::Const(item) if has_stored_constants && tokens(&item.ident) != "_" => {
            let (name, ty, value) = (&item.ident, tokens(&item.ty), tokens(&item.expr));
            let _ = writeln!(text, "const {name}: {ty} = {value}");
        }
        Item::Impl(item) if item.trait_.is_none() && has_stored_constants => {
            let of = tokens(&item.self_ty);
            for part in &item.items {
                if let syn::ImplItem::Const(item) = part {
                    let (name, ty, value) = (&item.ident, tokens(&item.ty), tokens(&item.expr));
                    let _ = writeln!(text, "const {of}::{name}: {ty} = {value}");
                }
            }
        }
        Item::Mod(item) => {
            for item in item.content.iter().flat_map(|(_, items)| items) {
                describe_item(text, item, has_stored_constants);
            }
        }
        _ => {}
    }
}

fn describe_fields<'a>(text: &mut String, fields: impl Iterator<Item = &'a Field>) {
    for (at, field) in fields.enumerate() {
        let name = field.ident.as_ref().map(ToString::to_string);
        let name = name.unwrap_or_else(|| at.to_string());
        let _ = writeln!(text, "    {name}: {}", tokens(&field.ty));
    }
}

/// Returns the `repr(...)` of a type; `None` if the type has none. Only `repr` types cross the
/// kernel/user boundary.
fn repr(attributes: &[Attribute]) -> Option<String> {
    let mut all = attributes.iter().filter(|attribute| is(attribute, "repr"));
    let first = tokens(&all.next()?.meta);
    Some(all.fold(first, |text, more| format!("{text} {}", tokens(&more.meta))))
}

fn is(attribute: &Attribute, name: &str) -> bool {
    attribute.path().is_ident(name)
}

/// Returns the source text with whitespace normalized.
fn tokens(of: &impl ToTokens) -> String {
    let spaced = of.to_token_stream().to_string();
    spaced.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the tokens without `#[doc = ...]` attributes, at any depth.
fn without_comments(of: proc_macro2::TokenStream) -> String {
    use proc_macro2::{Group, TokenStream, TokenTree};
    fn strip(stream: TokenStream) -> TokenStream {
        let mut kept: Vec<TokenTree> = Vec::new();
        for token in stream {
            let TokenTree::Group(group) = token else {
                kept.push(token);
                continue;
            };
            let is_doc = group.stream().to_string().starts_with("doc =");
            let follows_hash =
                matches!(kept.last(), Some(TokenTree::Punct(p)) if p.as_char() == '#');
            if is_doc && follows_hash {
                kept.pop();
            } else {
                kept.push(Group::new(group.delimiter(), strip(group.stream())).into());
            }
        }
        kept.into_iter().collect()
    }
    tokens(&strip(of))
}

/// Returns the names of a file's `macro_rules!` that define `repr` types.
fn makers(items: &[Item]) -> Vec<String> {
    let made = items.iter().filter_map(|item| match item {
        Item::Macro(item) if tokens(&item.mac.tokens).contains("repr") => item.ident.as_ref(),
        _ => None,
    });
    made.map(ToString::to_string).collect()
}

/// Appends the definition, or an invocation, of a macro that defines `repr` types: together they
/// describe the types.
fn describe_made(text: &mut String, item: &ItemMacro, makers: &[String]) {
    let body = without_comments(item.mac.tokens.clone());
    let name = match &item.ident {
        Some(name) => name.to_string(),
        None => tokens(&item.mac.path),
    };
    if !makers.contains(&name) {
        return;
    }
    match item.ident {
        Some(_) => drop(writeln!(text, "macro {name} {body}")),
        None => {
            let _ = writeln!(text, "{name}!");
            for part in body
                .split([',', ';'])
                .filter(|part| !part.trim().is_empty())
            {
                let _ = writeln!(text, "    {}", part.trim());
            }
        }
    }
}

fn version(description: &str) -> Option<u32> {
    description
        .lines()
        .next()?
        .strip_prefix("version ")?
        .parse()
        .ok()
}

/// Compares the committed description with the present one.
///
/// # Errors
/// They differ; the text says how, and what to do.
fn judge(kept: &str, now: &str) -> std::result::Result<(), String> {
    if kept == now {
        return Ok(());
    }
    let (Some(then), Some(is)) = (version(kept), version(now)) else {
        return Err(format!(
            "{LAYOUT} is missing or no description: write it by `{WRITE}`"
        ));
    };
    let difference = difference(kept, now);
    Err(if is > then {
        format!(
            "ABI_VERSION is {is}, {LAYOUT} is of {then}: write the new one by `{WRITE}`, and commit \
             it with the change\n{difference}"
        )
    } else {
        format!(
            "what ABI_VERSION {then} stands for has changed, and a process of another build would \
             read pinned maps wrong: raise ABI_VERSION in {SOURCES}/lib.rs, then `{WRITE}`. If no \
             release has that version yet, `{WRITE} --unreleased` is enough\n{difference}"
        )
    })
}

/// Checks that a description may replace the committed one.
///
/// # Errors
/// They differ under the same version.
fn may_replace(committed: &str, now: &str) -> std::result::Result<(), String> {
    let (then, is) = (version(committed), version(now));
    if committed == now || then.is_none() || is > then {
        return Ok(());
    }
    Err(format!(
        "the description differs from the committed one of the same version {}: raise ABI_VERSION \
         in {SOURCES}/lib.rs first (or give --unreleased, if no release has that version)\n{}",
        then.unwrap_or_default(),
        difference(committed, now)
    ))
}

/// Returns the line diff of two descriptions (longest common subsequence).
fn difference(then: &str, now: &str) -> String {
    let (then, now): (Vec<_>, Vec<_>) = (then.lines().collect(), now.lines().collect());
    // How many lines the rests from here have in common, in order.
    let mut common = vec![vec![0; now.len() + 1]; then.len() + 1];
    for a in (0..then.len()).rev() {
        for b in (0..now.len()).rev() {
            common[a][b] = match then[a] == now[b] {
                true => common[a + 1][b + 1] + 1,
                false => common[a + 1][b].max(common[a][b + 1]),
            };
        }
    }
    let (mut a, mut b) = (0, 0);
    let mut text = String::new();
    while a < then.len() || b < now.len() {
        if a < then.len() && b < now.len() && then[a] == now[b] {
            (a, b) = (a + 1, b + 1);
        } else if a < then.len() && (b == now.len() || common[a + 1][b] >= common[a][b + 1]) {
            let _ = writeln!(text, "- {}", then[a]);
            a += 1;
        } else {
            let _ = writeln!(text, "+ {}", now[b]);
            b += 1;
        }
    }
    text
}

#[cfg(test)]
#[path = "abi_test.rs"]
mod tests;
