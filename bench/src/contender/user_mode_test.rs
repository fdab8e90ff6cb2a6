use std::{fs, os::unix::fs::symlink};

use super::*;

#[test]
fn a_pasta_that_the_mount_hides_is_refused_by_its_variable() {
    for hidden in ["/mnt/pasta", "/mnt/tools/../pasta"] {
        // Whether it is there or not: a name below is refused before it is looked for.
        let why = check_named(hidden);
        assert!(why.contains("SLIPGATE_PASTA=/mnt/"), "{why}");
        assert!(why.contains("copy it elsewhere"), "{why}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pasta");
    fs::write(&file, "").unwrap();
    let link = folder.path().join("link");
    symlink(&file, &link).unwrap();
    check_reach(&file).unwrap();
    check_reach(&link).unwrap();
    check_reach(Path::new("/mntx/pasta")).unwrap();
    // A link that leads there.
    let into = folder.path().join("into");
    symlink("/mnt", &into).unwrap();
    assert!(check_reach(&into).is_err());
}

fn check_named(path: &str) -> String {
    check_reach(Path::new(path)).unwrap_err().to_string()
}
