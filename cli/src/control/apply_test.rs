use super::*;

#[test]
fn a_link_is_sent_as_a_link_and_what_is_not_there_is_said_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("v1.toml"), dir.path().join("now.toml"));
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(absolute(&link).unwrap(), link);
    assert!(absolute(&dir.path().join("gone.toml")).is_err());
    assert!(absolute(Path::new("Cargo.toml")).unwrap().is_absolute());
}
