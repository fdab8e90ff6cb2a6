//! docs/test-matrix.md lists each body with its cells; this writes it, and fails while it is not true.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use slipgate_testbed::rig::DEVICE_TESTS;

const CELLS: [&str; 4] = ["hybrid_ipv4", "hybrid_ipv6", "user_ipv4", "user_ipv6"];

/// Modules none of whose tests is written by cell, and why. A folder stands for all in it.
const OUTSIDE: [(&str, &str); 11] = [
    (
        "as_passt",
        "command lines of libvirt, libkrun and muvm; what a guest at the socket then has is user mode's",
    ),
    (
        "exec",
        "a command in place of a guest; its two families are in `ways_in` and `ipv6`",
    ),
    (
        "firecracker",
        "recipes for a VMM that is named by a variable",
    ),
    (
        "ipv6",
        "what IPv6 alone has: how a guest configures itself, its addresses, routed prefixes, ports of its own",
    ),
    (
        "libvirt",
        "recipes for a libvirt that is named by a variable",
    ),
    ("reconnecting", "whether QEMU connects to the socket again"),
    ("socket", "who may come to the socket, and what it refuses"),
    (
        "unprivileged_demo",
        "the demonstration by cargo, which has no guest",
    ),
    (
        "unprivileged_forwards",
        "ports that lead to a command and to slipgate's own VM; their two families are in `ways_in`, and those that lead to a guest in `forwards`",
    ),
    (
        "unprivileged_run",
        "slipgate's own VM and its VMM; its two families are in `ways_in`",
    ),
    (
        "vhost_user",
        "rings that a VMM gives; its two families are in `ways_in`",
    ),
];

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

/// The text of each module, by its path.
fn modules() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut folders = vec![here()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let module = path.strip_prefix(here()).unwrap().with_extension("");
            let module = module.display().to_string().replace('/', "::");
            let text = fs::read_to_string(&path).unwrap();
            all.insert(module.replace("::mod", ""), text);
        }
    }
    all
}

/// The lines of each module that has some.
fn lines() -> BTreeMap<String, Vec<Line>> {
    let all = modules().into_iter();
    let lines = all.map(|(module, text)| (module, lines_of(&text)));
    lines.filter(|(_, lines)| !lines.is_empty()).collect()
}

fn lines_of(text: &str) -> Vec<Line> {
    let blocks = text.split("\nmatrix! {\n").skip(1);
    let blocks = blocks.map(|behind| behind.split_once("\n}").unwrap().0);
    blocks.flat_map(parse).collect()
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
         Other tests of the same modules are of what only one mode or family has; modules without any \
         body are at the end.\n\n\
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
                        let body = format!("{module}::{}", line.body);
                        let needs_a_device = DEVICE_TESTS.contains(&&*body);
                        if needs_a_device { "runs (D)" } else { "runs" }.to_owned()
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
    out.push_str(
        "\nD: needs a VRF, a VLAN, a macvlan or WireGuard. Where the kernel has none, the test says so and leaves out \
         what needs it. The tier kernels runs it on Debian's 6.1 and 6.12, which have them: \
         `end_to_end_with_vrfs_vlans_and_wireguard_on_6_1`, \
         `end_to_end_with_vrfs_vlans_and_wireguard_on_6_12` (Q).\n\nWhy not:\n\n",
    );
    for (number, reason) in reasons.iter().enumerate() {
        out.push_str(&format!("{}. {reason}.\n", number + 1));
    }
    out.push_str("\nModules none of whose tests is written by cell:\n\n");
    for (module, reason) in OUTSIDE {
        out.push_str(&format!("- `{module}`: {reason}.\n"));
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

/// A new module is written by cell, or says why not.
#[test]
fn each_module_outside_the_matrix_says_why() {
    let is_outside = |text: &String| text.contains("\n#[test]\n") && lines_of(text).is_empty();
    let mut found: Vec<String> = modules()
        .into_iter()
        .filter(|(module, text)| is_outside(text) && !module.starts_with("matrix::"))
        .map(|(module, _)| module.split("::").next().unwrap().to_owned())
        .collect();
    found.dedup();
    assert_eq!(found, OUTSIDE.map(|(module, _)| module));
}

/// What a body leaves out for want of a device of the kernel's would else be run nowhere.
#[test]
fn each_body_that_needs_a_device_of_the_kernels_runs_where_there_is_one() {
    let mut found = Vec::new();
    for (module, lines) in lines() {
        let path = here().join(module.replace("::", "/")).with_extension("rs");
        let text = fs::read_to_string(path).unwrap_or_default();
        for line in lines {
            let body = text.split(&format!("\nfn {}(", line.body)).nth(1);
            let body = body.and_then(|behind| behind.split("\n}\n").next());
            if body.is_some_and(|body| body.contains("left_out!(\"the kernel has no")) {
                found.push(format!("{module}::{}", line.body));
            }
        }
    }
    assert_eq!(found, DEVICE_TESTS);
}
