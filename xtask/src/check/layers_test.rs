use super::{LAYERS, allowed, wrong_arrows};
use crate::metadata::{Package, parse};

fn package(name: &str, dependency: &str, kind: &str, path: &str) -> Package {
    let told = format!(
        r#"{{"packages": [{{"name": "{name}", "manifest_path": "/repo/Cargo.toml", "dependencies":
            [{{"name": "{dependency}", "kind": {kind}, "path": {path}, "req": "*"}}],
            "targets": [{{"kind": ["lib"], "src_path": "/repo/src/lib.rs"}}]}}],
            "workspace_members": []}}"#
    );
    parse(&told).unwrap().remove(0)
}

const HERE: &str = r#""/repo/somewhere""#;

#[test]
fn arrows_of_the_design_are_right() {
    for (from, to) in [
        ("slipgate-control", "slipgate-abi"),
        ("slipgate", "userspace-nat"),
        ("slipgate-policy", "slipgate-abi"),
        ("userspace-nat", "slipgate-policy"),
        ("slipgate-ipc", "slipgate-policy"),
        ("slipgate-broker", "slipgate-ipc"),
        ("slipgate-broker", "slipgate-control"),
        ("userspace-nat", "slipgate-model"),
        ("slipgate-ipc", "slipgate-model"),
        ("slipgate", "slipgate-broker"),
    ] {
        assert!(
            wrong_arrows(&package(from, to, "null", HERE)).is_empty(),
            "{from} -> {to}"
        );
    }
}

#[test]
fn arrows_that_point_back_are_named() {
    for (from, to) in [
        ("slipgate-abi", "slipgate-control"),
        ("userspace-nat", "slipgate-control"),
        ("slipgate-policy", "userspace-nat"),
        ("userspace-nat", "slipgate-ipc"),
        ("slipgate-ipc", "userspace-nat"),
        ("slipgate-ipc", "slipgate-broker"),
        ("slipgate-broker", "slipgate"),
        ("slipgate-broker", "slipgate-vmm"),
        ("slipgate-broker", "userspace-nat"),
        ("slipgate-model", "slipgate-ipc"),
        ("slipgate-vmm", "userspace-nat"),
        ("xtask", "slipgate-abi"),
    ] {
        let wrong = wrong_arrows(&package(from, to, "null", HERE));
        assert_eq!(wrong, [format!("{from} depends on {to}")]);
    }
}

#[test]
fn tests_may_use_the_testbed_but_those_of_xtask_may_not() {
    let of = |name| wrong_arrows(&package(name, "slipgate-testbed", r#""dev""#, HERE));
    assert!(of("slipgate-control").is_empty());
    assert_eq!(of("xtask").len(), 1);
    let ordinary = package("slipgate-control", "slipgate-testbed", "null", HERE);
    assert_eq!(wrong_arrows(&ordinary).len(), 1);
}

#[test]
fn aya_is_for_control() {
    assert!(wrong_arrows(&package("slipgate-control", "aya", "null", "null")).is_empty());
    assert_eq!(
        wrong_arrows(&package("slipgate", "aya", "null", "null")).len(),
        1
    );
    assert_eq!(
        wrong_arrows(&package("slipgate-testbed", "aya-obj", "null", "null")).len(),
        1
    );
}

#[test]
fn a_crate_without_a_place_is_named() {
    let wrong = wrong_arrows(&package("slipgate-extra", "libc", "null", "null"));
    assert!(
        wrong[0].contains("slipgate-extra has no place"),
        "{wrong:?}"
    );
}

#[test]
fn the_table_has_no_cycle() {
    let mut placed: Vec<&str> = Vec::new();
    for _ in LAYERS {
        for (name, row) in LAYERS {
            if !placed.contains(name) && allowed(row).all(|a| placed.contains(&a.as_str())) {
                placed.push(name);
            }
        }
    }
    assert_eq!(placed.len(), LAYERS.len());
}
