"""The endpoints of sandboxes, by idea: create, list, one, life, …"""
