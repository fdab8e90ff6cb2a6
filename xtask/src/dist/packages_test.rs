use std::collections::BTreeSet;

use serde_json::Value;

use super::*;

/// Each file of a package: where it comes from, and where it goes, without the first slash.
type Assets = BTreeSet<(String, String)>;

fn assets(workspace: &Workspace) -> [Assets; 2] {
    let told = capture(
        workspace
            .cargo()
            .args(["metadata", "--no-deps", "--format-version=1"]),
    );
    let told: Value = serde_json::from_str(&told.unwrap()).unwrap();
    let packages = told["packages"].as_array().unwrap();
    let package = packages
        .iter()
        .find(|package| package["name"] == "slipgate");
    let metadata = &package.unwrap()["metadata"];
    let text = |value: &Value| value.as_str().unwrap().trim_start_matches('/').to_owned();
    let deb = metadata["deb"]["assets"].as_array().unwrap();
    let rpm = metadata["generate-rpm"]["assets"].as_array().unwrap();
    [
        deb.iter().map(|a| (text(&a[0]), text(&a[1]))).collect(),
        rpm.iter()
            .map(|a| (text(&a["source"]), text(&a["dest"])))
            .collect(),
    ]
}

#[test]
fn both_packages_have_the_same_files_and_all_that_are_for_them() {
    let workspace = Workspace::find().unwrap();
    let [deb, rpm] = assets(&workspace);
    // zsh's folder is the distribution's.
    let elsewhere = |(_, to): &&(String, String)| !to.contains("/zsh/");
    assert_eq!(
        deb.iter().filter(elsewhere).collect::<Vec<_>>(),
        rpm.iter().filter(elsewhere).collect::<Vec<_>>()
    );
    assert_eq!(deb.len(), rpm.len());
    for entry in fs::read_dir(workspace.root.join("packaging")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            let source = format!("../packaging/{}", entry.file_name().to_string_lossy());
            assert!(deb.iter().any(|(from, _)| *from == source), "{source}");
        }
    }
}

#[test]
fn digests_are_of_each_file() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(scratch.path().join("b"), "abc").unwrap();
    fs::write(scratch.path().join("a"), "").unwrap();
    sum(scratch.path()).unwrap();
    let sums = fs::read_to_string(scratch.path().join("SHA256SUMS")).unwrap();
    let lines: Vec<_> = sums.lines().collect();
    assert!(
        lines[0].ends_with("  a") && lines[1].ends_with("  b"),
        "{sums}"
    );
    // FIPS 180-2's example.
    assert!(
        lines[1].starts_with("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    );
}
