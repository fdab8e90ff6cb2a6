use super::*;

#[test]
fn holes_take_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let sparse = fs::File::create(dir.path().join("memory")).unwrap();
    sparse.set_len(64 * MIB).unwrap();
    assert!(bytes_of(dir.path()).unwrap() < MIB);
    let written = vec![7; 2 * MIB as usize];
    fs::write(dir.path().join("state"), written).unwrap();
    fs::File::open(dir.path().join("state"))
        .unwrap()
        .sync_all()
        .unwrap();
    let bytes = bytes_of(dir.path()).unwrap();
    assert!((2 * MIB..3 * MIB).contains(&bytes), "{bytes}");
    assert!(bytes_of(&dir.path().join("gone")).is_err());
}
