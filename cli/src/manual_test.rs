use std::collections::BTreeSet;

use super::*;

/// Each command that `--help` shows, as in `slipgate-vm-add`, with its long flags.
fn commands(command: &Command, name: String, all: &mut Vec<(String, Vec<String>)>) {
    let flags = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let flags = flags.filter_map(|arg| arg.get_long().map(str::to_owned));
    all.push((name.clone(), flags.collect()));
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        commands(sub, format!("{name}-{}", sub.get_name()), all);
    }
}

#[test]
fn each_command_and_flag_is_in_its_page_and_in_each_completion() {
    let scratch = tempfile::tempdir().unwrap();
    write(scratch.path()).unwrap();
    let mut all = Vec::new();
    commands(&CommandLine::command(), "slipgate".into(), &mut all);
    assert!(all.iter().any(|(name, _)| name == "slipgate-vm-add"));
    for (name, flags) in &all {
        let page = scratch.path().join("man").join(format!("{name}.1"));
        let page = fs::read_to_string(&page).unwrap_or_else(|e| panic!("{name}: {e}"));
        for flag in flags {
            // roff has its hyphens escaped.
            let flag = format!("\\-\\-{}", flag.replace('-', "\\-"));
            assert!(page.contains(&flag), "{name}: no {flag}");
        }
    }
    let pages = fs::read_dir(scratch.path().join("man")).unwrap().flatten();
    let pages: BTreeSet<_> = pages
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    for hidden in ["engine", "vmm", "metrics", "api", "manual"] {
        assert!(!pages.contains(&format!("slipgate-{hidden}.1")), "{hidden}");
    }
    for file in ["slipgate.bash", "_slipgate", "slipgate.fish"] {
        let text = fs::read_to_string(scratch.path().join("completions").join(file)).unwrap();
        for (name, _) in &all {
            let last = name.rsplit('-').next().unwrap();
            assert!(text.contains(last), "{file}: no {name}");
        }
        assert!(text.contains("max-flows"), "{file}");
        assert!(!text.contains("slipgate__vmm"), "{file}");
        assert!(!text.contains("The VMM process"), "{file}");
    }
}
