//! Checks which crates may depend on which, as in docs/architecture.md, "Layers".

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::{
    metadata::{self, Dependency, Package},
    workspace::{Workspace, capture},
};

/// Crates of the repository, each with the crates of the repository that it may depend on.
const LAYERS: &[(&str, &str)] = &[
    ("slipgate-abi", ""),
    ("slipgate-programs", "abi"),
    ("slipgate-control", "abi"),
    ("slipgate-policy", "abi"),
    ("slipgate-model", "abi policy"),
    ("userspace-nat", "abi policy model"),
    ("slipgate-ipc", "abi policy model"),
    ("slipgate-api", "abi policy model ipc"),
    ("slipgate-vmm", ""),
    ("slipgate-guest", ""),
    ("slipgate-broker", "abi control policy model ipc"),
    (
        "slipgate",
        "abi control policy model nat ipc api broker vmm",
    ),
    (
        "slipgate-testbed",
        "abi control policy model nat ipc broker vmm guest",
    ),
    ("slipgate-bench", "abi control policy model nat vmm testbed"),
    ("slipgate-fuzz", "abi policy model nat ipc api vmm"),
    ("xtask", ""),
];

/// Returns the crate names in a row of [`LAYERS`].
fn allowed(row: &str) -> impl Iterator<Item = String> {
    row.split_whitespace().map(|short| match short {
        "nat" => "userspace-nat".to_owned(),
        short => format!("slipgate-{short}"),
    })
}

/// Crates that the tests of every crate may also use.
const FOR_TESTS: [&str; 1] = ["slipgate-testbed"];

/// Crates that may depend on aya. The ABI does under a feature only, for `Pod`.
const KNOW_AYA: [&str; 2] = ["slipgate-control", "slipgate-abi"];

/// Crates that must not depend on aya, directly or indirectly.
const WITHOUT_AYA: [&str; 6] = [
    "slipgate-policy",
    "slipgate-api",
    "slipgate-model",
    "userspace-nat",
    "slipgate-ipc",
    "slipgate-vmm",
];

/// Crates that must not depend on KVM crates, directly or indirectly.
const WITHOUT_KVM: [&str; 7] = [
    "slipgate-api",
    "slipgate-control",
    "slipgate-policy",
    "slipgate-model",
    "userspace-nat",
    "slipgate-ipc",
    "slipgate-broker",
];

/// Checks all crates.
///
/// # Errors
/// A dependency is not allowed; the error lists all such dependencies.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let mut packages = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    let members = packages.len();
    for other in ["ebpf/programs/Cargo.toml", "fuzz/Cargo.toml"] {
        packages.extend(metadata::packages(workspace, &workspace.root.join(other))?);
    }
    let mut wrong: Vec<String> = packages.iter().flat_map(wrong_arrows).collect();
    for package in &packages[..members] {
        wrong.extend(wrong_libraries(workspace, &package.name)?);
    }
    if !wrong.is_empty() {
        bail!("the layers are broken:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

/// Returns the forbidden libraries that a workspace member depends on indirectly.
fn wrong_libraries(workspace: &Workspace, package: &str) -> Result<Vec<String>> {
    let forbidden: Vec<IsLibrary> = [
        (WITHOUT_AYA.contains(&package), is_aya as IsLibrary),
        (WITHOUT_KVM.contains(&package), is_kvm),
    ]
    .into_iter()
    .filter_map(|(is_forbidden, is_it)| is_forbidden.then_some(is_it))
    .collect();
    if forbidden.is_empty() {
        return Ok(Vec::new());
    }
    let all = capture(
        workspace
            .cargo()
            .args([
                "tree",
                "--edges=no-dev",
                "--prefix=none",
                "--format={p}",
                "--package",
            ])
            .arg(package),
    )?;
    let names: BTreeSet<&str> = all
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| forbidden.iter().any(|is_it| is_it(name)))
        .collect();
    Ok(names
        .into_iter()
        .map(|name| {
            format!("{package} comes to depend on {name}: `cargo tree -p {package} -i {name}`")
        })
        .collect())
}

type IsLibrary = fn(&str) -> bool;

fn wrong_arrows(package: &Package) -> Vec<String> {
    let name = package.name.as_str();
    let Some((_, row)) = LAYERS.iter().find(|(layer, _)| *layer == name) else {
        return vec![format!(
            "{name} has no place in xtask/src/check/layers.rs: give it one"
        )];
    };
    let may = |dependency: &Dependency| {
        let wanted = dependency.name.as_str();
        if is_aya(wanted) {
            return KNOW_AYA.contains(&name);
        }
        let is_test = dependency.kind.as_deref() == Some("dev");
        dependency.path.is_none()
            || allowed(row).any(|allowed| allowed == wanted)
            || (is_test && name != "xtask" && FOR_TESTS.contains(&wanted))
    };
    package
        .dependencies
        .iter()
        .filter(|dependency| !may(dependency))
        .map(|dependency| format!("{name} depends on {}", dependency.name))
        .collect()
}

/// Whether a crate is part of aya's userspace side.
fn is_aya(name: &str) -> bool {
    ["aya", "aya-obj", "aya-log"].contains(&name)
}

fn is_kvm(name: &str) -> bool {
    ["kvm-ioctls", "kvm-bindings"].contains(&name)
}

#[cfg(test)]
#[path = "layers_test.rs"]
mod tests;
