use super::*;

#[test]
fn a_directory_that_cannot_be_made_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("not/yet");
    let finding = of_tables(&inside);
    assert_eq!(finding.state, State::Ok, "{finding:?}");
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    // Root may write to a file, too, but nobody may search it.
    let finding = of_tables(&file.join("slipgate"));
    assert_eq!(finding.state, State::Note, "{finding:?}");
    assert!(finding.remedy.unwrap().contains("XDG_RUNTIME_DIR"));
}

#[test]
fn what_keeps_commands_from_running_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let tun = dir.path().join("tun");
    for part in ["user", "kernel"] {
        fs::create_dir(dir.path().join(part)).unwrap();
    }
    let remedy = || of_commands(dir.path(), &tun).remedy;
    for (setting, forbids, permits) in [
        ("user/max_user_namespaces", "0\n", "10000\n"),
        ("kernel/unprivileged_userns_clone", "0\n", "1\n"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1\n", "0\n"),
    ] {
        let file = dir.path().join(setting);
        let name = setting.split_once('/').unwrap().1;
        assert!(remedy().unwrap().contains("chmod 666"), "before {setting}");
        fs::write(&file, forbids).unwrap();
        assert!(remedy().unwrap().contains(name));
        fs::write(&file, permits).unwrap();
    }
    assert!(remedy().unwrap().contains("chmod 666"));
    fs::write(&tun, "").unwrap();
    assert_eq!(of_commands(dir.path(), &tun).state, State::Ok);
}

#[test]
fn what_keeps_processes_from_io_uring_is_told() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("kernel")).unwrap();
    let finding = || of_rings(dir.path());
    assert_eq!(finding().state, State::Ok, "a kernel without the setting");
    for (value, state) in [
        ("0\n", State::Ok),
        ("1\n", State::Note),
        ("2\n", State::Note),
    ] {
        fs::write(dir.path().join("kernel/io_uring_disabled"), value).unwrap();
        assert_eq!(finding().state, state, "{value}");
    }
    let found = finding();
    assert!(found.found.contains("kernel.io_uring_disabled=2"));
    assert!(found.remedy.unwrap().contains("readv"));
}
