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
    let [most, tun] = ["most", "tun"].map(|name| dir.path().join(name));
    fs::write(&most, "0\n").unwrap();
    assert!(
        of_commands(&most, &tun)
            .remedy
            .unwrap()
            .contains("max_user_namespaces")
    );
    fs::write(&most, "10000\n").unwrap();
    assert!(
        of_commands(&most, &tun)
            .remedy
            .unwrap()
            .contains("chmod 666")
    );
    fs::write(&tun, "").unwrap();
    assert_eq!(of_commands(&most, &tun).state, State::Ok);
}
