use super::*;

#[test]
fn too_little_room_is_said_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    check_room(folder.path(), 1).unwrap();
    let why = check_room(folder.path(), 1 << 60).unwrap_err().to_string();
    let name = folder.path().display();
    let needs = format!("needs {} MiB in {name}, which has ", 1_u64 << 40);
    assert!(why.contains(&needs), "{why}");
    let remedy = format!("`mount -o remount,size={}M {name}`", 1_u64 << 41);
    assert!(why.contains(&remedy), "{why}");
    let missing = folder.path().join("missing");
    let why = check_room(&missing, 1).unwrap_err().to_string();
    assert!(why.contains("missing"), "{why}");
}
