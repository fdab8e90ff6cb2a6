//! Which crate may depend on which: docs/architecture.md, "Layers". Nothing points back.

use anyhow::{Result, bail};

use crate::{
    metadata::{self, Dependency, Package},
    workspace::{Workspace, capture},
};

/// Every crate of the repository, and the crates of the repository it may depend on.
const LAYERS: &[(&str, &[&str])] = &[
    ("slipgate-abi", &[]),
    ("slipgate-programs", &["slipgate-abi"]),
    ("slipgate-control", &["slipgate-abi"]),
    ("userspace-nat", &["slipgate-abi"]),
    ("slipgate-vmm", &[]),
    ("slipgate-guest", &[]),
    (
        "slipgate",
        &[
            "slipgate-abi",
            "slipgate-control",
            "userspace-nat",
            "slipgate-vmm",
        ],
    ),
    (
        "slipgate-testbed",
        &[
            "slipgate-abi",
            "slipgate-control",
            "userspace-nat",
            "slipgate-vmm",
            "slipgate-guest",
        ],
    ),
    (
        "slipgate-bench",
        &[
            "slipgate-abi",
            "slipgate-control",
            "userspace-nat",
            "slipgate-vmm",
            "slipgate-testbed",
        ],
    ),
    ("xtask", &[]),
];

/// What any crate's tests may use besides.
const FOR_TESTS: [&str; 1] = ["slipgate-testbed"];

/// The crates that may name aya; the ABI does under a feature, for the sake of `Pod`.
const KNOW_AYA: [&str; 2] = ["slipgate-control", "slipgate-abi"];

/// The crates that must do without aya, also through others.
const WITHOUT_AYA: [&str; 2] = ["userspace-nat", "slipgate-vmm"];

/// An error that lists every arrow which points the wrong way.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let mut packages = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    let programs = workspace.root.join("ebpf/programs/Cargo.toml");
    packages.extend(metadata::packages(workspace, &programs)?);
    let mut wrong: Vec<String> = packages.iter().flat_map(wrong_arrows).collect();
    for package in packages
        .iter()
        .filter(|p| WITHOUT_AYA.contains(&p.name.as_str()))
    {
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
                .arg(&package.name),
        )?;
        if all
            .lines()
            .any(|line| is_aya(line.split(' ').next().unwrap_or_default()))
        {
            wrong.push(format!(
                "{} comes to depend on aya: `cargo tree -i aya`",
                package.name
            ));
        }
    }
    if !wrong.is_empty() {
        bail!("the layers are broken:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

fn wrong_arrows(package: &Package) -> Vec<String> {
    let name = package.name.as_str();
    let Some((_, allowed)) = LAYERS.iter().find(|(layer, _)| *layer == name) else {
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
            || allowed.contains(&wanted)
            || (is_test && name != "xtask" && FOR_TESTS.contains(&wanted))
    };
    package
        .dependencies
        .iter()
        .filter(|dependency| !may(dependency))
        .map(|dependency| format!("{name} depends on {}", dependency.name))
        .collect()
}

/// The userspace side of aya, whatever its crate.
fn is_aya(name: &str) -> bool {
    ["aya", "aya-obj", "aya-log"].contains(&name)
}

#[cfg(test)]
#[path = "layers_test.rs"]
mod tests;
