use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{Graph, cycles, describe, references};

/// The graph of a crate whose root is `src/lib.rs`.
fn graph(files: &[(&str, &str)]) -> Graph {
    let files: BTreeMap<PathBuf, &str> = files
        .iter()
        .map(|(path, text)| (PathBuf::from(path), *text))
        .collect();
    let read = |path: &Path| {
        let text = files.get(path).context("no such file")?;
        Ok((*text).to_owned())
    };
    references::graph(Path::new("src/lib.rs"), &read).unwrap()
}

/// The graph's edges, as `from → to: file:line`.
fn edges(files: &[(&str, &str)]) -> Vec<String> {
    graph(files)
        .iter()
        .flat_map(|((from, to), places)| {
            places
                .iter()
                .map(move |place| format!("{from}→{to} {}:{}", place.file.display(), place.line))
        })
        .collect()
}

fn chains(files: &[(&str, &str)]) -> Vec<String> {
    let found = cycles(&graph(files));
    found.iter().map(|cycle| cycle.join(" ")).collect()
}

const ROOT: (&str, &str) = ("src/lib.rs", "mod a;\nmod b;\nmod c;\n");

#[test]
fn a_cycle_is_found_and_described() {
    let files = [
        ROOT,
        ("src/a.rs", "use crate::b::B;\nfn f() { crate::b::g(); }"),
        ("src/b.rs", "\nfn g(of: super::c::C) {}"),
        ("src/c.rs", "mod deep;"),
        ("src/c/deep.rs", "// one\n// two\nuse super::super::a;"),
    ];
    assert_eq!(chains(&files), ["a b c"]);
    let mut report = String::new();
    let graph = graph(&files);
    describe(&mut report, "it", Path::new(""), &cycles(&graph)[0], &graph);
    assert_eq!(
        report,
        "  it: a → b → c → a\n    a → b: src/a.rs:1 and 1 more\n    b → c: src/b.rs:2\n    \
         c → a: src/c/deep.rs:3\n"
    );
}

#[test]
fn every_edge_of_a_cycle_is_in_a_reported_one() {
    let files = [
        ROOT,
        ("src/a.rs", "use crate::{b, c};"),
        ("src/b.rs", "use crate::{a, c};"),
        ("src/c.rs", "use crate::a;"),
    ];
    assert_eq!(chains(&files), ["a b", "a c", "a b c"]);
}

#[test]
fn what_only_points_one_way_is_no_cycle() {
    let files = [
        ROOT,
        ("src/a.rs", "use crate::{b::B, c};"),
        (
            "src/b.rs",
            "use crate::c; use self::inner::X; mod inner { use super::B; }",
        ),
        (
            "src/c.rs",
            "use std::fs; pub(in crate::a) struct X; // crate::a::A\n/// [`crate::a`]\nfn f() { let a = \"crate::a\"; }",
        ),
    ];
    assert_eq!(chains(&files), [""; 0]);
    assert_eq!(
        edges(&files),
        ["a→b src/a.rs:1", "a→c src/a.rs:1", "b→c src/b.rs:1"]
    );
}

#[test]
fn what_only_tests_name_is_no_edge() {
    let of_tests = "
        #[cfg(test)] use crate::a::A;
        #[cfg(test)] mod inline { use crate::a::A; }
        #[cfg(test)]
        #[path = \"b_test.rs\"]
        mod tests;
        struct S { #[cfg(test)] pub(crate) left: HashMap<u8, crate::a::A>, right: crate::c::C }
        fn f() {
            #[cfg(test)]
            let it = if true { crate::a::one() } else { crate::a::two() };
            match it { #[cfg(test)] 1 => { crate::a::three() } _ => crate::c::four() }
        }
        impl S { #[cfg(all(test, unix))] fn g() -> crate::a::A { crate::a::h() } }
        #[cfg(test)] impl<T, U> crate::a::Trait for X<T, U> { fn h(self) -> crate::a::A { todo() } }
    ";
    let files = [
        ROOT,
        ("src/a.rs", ""),
        ("src/b.rs", of_tests),
        ("src/c.rs", "#[path = \"c_test.rs\"] mod other;"),
    ];
    let lines = ["b→c src/b.rs:7", "b→c src/b.rs:11"];
    assert_eq!(edges(&files), lines);
}

#[test]
fn what_tests_share_with_others_is_an_edge() {
    let files = [
        ROOT,
        (
            "src/a.rs",
            "#[cfg(any(test, feature = \"fake\"))] use crate::b::B;",
        ),
        ("src/b.rs", "#[cfg(not(test))] use crate::a::A;"),
        ("src/c.rs", ""),
    ];
    assert_eq!(chains(&files), ["a b"]);
}

#[test]
fn a_re_export_of_the_root_is_followed() {
    let root = "
        mod a; mod b; mod c;
        pub use a::A;
        pub use { b::{inner::X as Y, self as other}, c::* };
        pub use Y as Z;
        pub struct Own;
    ";
    let files = [
        ("src/lib.rs", root),
        ("src/a.rs", "use crate::Own;\nuse crate::Z;"),
        ("src/b.rs", "use super::C;\nuse crate::Nothing;"),
        ("src/c.rs", "pub struct C;\nuse crate::{A, other::X};"),
    ];
    assert_eq!(
        edges(&files),
        [
            "a→b src/a.rs:2",
            "b→c src/b.rs:1",
            "c→a src/c.rs:2",
            "c→b src/c.rs:2"
        ]
    );
}

#[test]
fn paths_are_found_wherever_they_are() {
    for text in [
        "fn f() { bail!(\"no {}\", crate::b::name()) }",
        "macro_rules! m { () => { $crate::b::name() } }",
        "type X = Vec<<crate::b::B as Trait>::Y>;",
        "#[serde(default = \"crate::b::none\")] struct X;",
        "#[derive(crate::b::Derive)] struct X;",
        "fn f() { use super::{c as other, b::B}; }",
        "mod deep { pub(super) fn f() { super::super::b::B {} } }",
        "use super::*; fn f() { b::name() }",
        "impl crate::b::Trait for X {}",
    ] {
        let files = [ROOT, ("src/a.rs", text), ("src/b.rs", ""), ("src/c.rs", "")];
        assert!(
            edges(&files).contains(&"a→b src/a.rs:1".to_owned()),
            "{text}"
        );
    }
}

#[test]
fn modules_are_found_in_their_files() {
    let root = "mod a; mod b { mod in_braces; } #[path = \"other/place.rs\"] mod c;";
    let files = [
        ("src/lib.rs", root),
        ("src/a/mod.rs", "mod deep;"),
        ("src/a/deep.rs", "use crate::b;"),
        ("src/b/in_braces.rs", "use crate::c;"),
        ("src/other/place.rs", "mod near;"),
        ("src/other/near.rs", "use crate::a;"),
    ];
    assert_eq!(chains(&files), ["a b c"]);
}
