"""``sftp://user@host/folder``: objects are files of an SFTP server, such as OpenSSH's."""
