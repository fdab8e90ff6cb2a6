use serde_json::json;

use super::*;

fn member(name: &str, folder: &str) -> metadata::Package {
    metadata::Package {
        name: name.into(),
        folder: folder.into(),
        dependencies: Vec::new(),
        roots: Vec::new(),
    }
}

/// What cargo writes of a target that it has compiled.
fn artifact(
    folder: &str,
    source: &str,
    kind: &str,
    test: bool,
    executable: Option<&str>,
) -> String {
    json!({
        "reason": "compiler-artifact",
        "manifest_path": format!("{folder}/Cargo.toml"),
        "target": { "kind": [kind], "src_path": format!("{folder}/{source}") },
        "profile": { "test": test },
        "executable": executable,
    })
    .to_string()
}

#[test]
fn what_was_compiled_for_tests_is_run_with_its_unit_tests_first() {
    let members = [
        member("slipgate", "/w/cli"),
        member("slipgate-abi", "/w/ebpf/abi"),
    ];
    let messages = [
        artifact(
            "/w/cli",
            "tests/run/main.rs",
            "test",
            true,
            Some("/t/deps/run-1"),
        ),
        artifact("/w/ebpf/abi", "src/lib.rs", "lib", false, None),
        // A binary that integration tests start.
        artifact("/w/cli", "src/main.rs", "bin", false, Some("/t/slipgate")),
        artifact(
            "/w/cli",
            "src/main.rs",
            "bin",
            true,
            Some("/t/deps/slipgate-2"),
        ),
        artifact("/r/serde", "src/lib.rs", "lib", false, None),
        "{\"reason\":\"build-finished\",\"success\":true}".to_owned(),
    ];
    let binaries = parse(&messages.join("\n"), &members);
    let titles: Vec<_> = binaries.iter().map(Binary::title).collect();
    assert_eq!(
        titles,
        [
            "     Running unittests src/main.rs (/t/deps/slipgate-2)",
            "     Running tests/run/main.rs (/t/deps/run-1)",
        ]
    );
    assert!(binaries.iter().all(|binary| binary.package == "slipgate"));
    let path_of = |package, source| Binary::path_of(&binaries, package, source);
    let run = path_of("slipgate", "tests/run/main.rs");
    assert_eq!(run, Some(Path::new("/t/deps/run-1")));
    assert_eq!(path_of("slipgate-abi", "tests/run/main.rs"), None);
}

#[test]
fn a_test_binary_is_run_in_the_directory_of_its_crate() {
    let members = [member("slipgate", "/w/cli")];
    let message = artifact(
        "/w/cli",
        "tests/run/main.rs",
        "test",
        true,
        Some("/t/run-1"),
    );
    let binaries = parse(&message, &members);
    let command = binaries[0].command().unwrap();
    assert_eq!(command.get_current_dir(), Some(Path::new("/w/cli")));
    let manifest = command
        .get_envs()
        .find(|(name, _)| *name == "CARGO_MANIFEST_DIR");
    assert_eq!(manifest.unwrap().1, Some("/w/cli".as_ref()));
}
