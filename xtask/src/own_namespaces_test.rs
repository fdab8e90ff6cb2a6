use std::fs;

use super::{SETTINGS, refused_by};

#[test]
fn a_refusal_names_the_setting_and_what_permits_namespaces() {
    for (setting, refusing, remedy) in SETTINGS {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(setting);
        fs::create_dir(file.parent().unwrap()).unwrap();
        fs::write(&file, format!("{refusing}\n")).unwrap();
        let why = refused_by(dir.path());
        let name = setting.replace('/', ".");
        assert!(
            why.contains(&format!("{name} is {refusing}")) && why.contains(remedy),
            "{why}"
        );
        fs::write(&file, "7\n").unwrap();
        assert!(!refused_by(dir.path()).contains(&name));
    }
}
